"""Documents out of files of many kinds in many places."""
