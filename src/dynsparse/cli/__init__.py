"""The `dynsparse` command: one file per subcommand, listed in `app.py`."""
