"""Programs that are sent to a cluster's head as small jobs. They need the standard library alone, and boto3 for runs
in a bucket: the cluster may not have this project installed, and what is sent is small."""
