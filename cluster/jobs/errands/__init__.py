"""Programs that are sent to a cluster's head as small jobs. Each is one file that needs the standard library alone:
the cluster may not have this project installed, and what is sent is small."""
