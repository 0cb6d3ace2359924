"""What `dynsparse bench` measured: pictures, tables, a page of the docs."""
