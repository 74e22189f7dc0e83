"""Runs without a shared folder: their files are kept in an object store, `--runs s3://BUCKET/PREFIX`.

A reader whose nodes share a folder may skip this package. Without a shared folder,

- `remote_run`: the driver takes a lease on the run, works in its node's cache and uploads what changes;
- `node_cache`: each node downloads the data set and what its ranks read, and uploads their logs;
- `driver_mailbox`: requests from the driver to the ranks, and rows from the ranks to the driver;
- `lease`: one holder at a time, by conditional writes.

Files common to this and to preparation, evaluation or training are in `common`: `cache`, `mirror`, `journal`.
"""
