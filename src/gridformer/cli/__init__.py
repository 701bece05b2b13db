"""The command line: one thin file a subcommand, no logic of its own."""
