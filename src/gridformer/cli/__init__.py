"""The command line: one thin file for each subcommand, without logic of its own."""
