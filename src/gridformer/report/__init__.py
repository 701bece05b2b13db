"""What run directories tell about runs, as a table on the terminal and as a page."""
