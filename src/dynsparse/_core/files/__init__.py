"""Files: reading untrusted ones within limits, atomic writes, locks of folders."""
