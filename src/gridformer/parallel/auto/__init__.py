"""What `auto` settings of a layout become: costs of the choices, heuristics, and decisions."""
