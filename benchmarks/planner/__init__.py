"""The planner's numbers: fits to published steps, and tables of published against predicted."""
