"""Commands that popsparse adds to `dynsparse`, through the entry points `dynsparse.commands`."""
