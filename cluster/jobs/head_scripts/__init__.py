"""Programs that are sent to a cluster's head as small jobs.

They need only the standard library, and boto3 for runs in a bucket: the cluster may not have this project installed.
All files of this folder are sent, and `__main__` runs one of the programs.
"""
