"""Commands that popsparse adds to `dynsparse`, by the entry points `dynsparse.commands`."""
