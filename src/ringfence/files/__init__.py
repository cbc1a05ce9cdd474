"""Files and archives on the host: the only opener of host paths that a guest or an archive shaped."""
