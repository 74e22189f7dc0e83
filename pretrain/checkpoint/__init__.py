"""The checkpoint format: named slices in safetensors files, and a manifest, whose creation is the commit.

    checkpoints/step-00001000/  rank-0000.RUN-LAUNCH.safetensors  rank-0000.RUN-LAUNCH.done  …  manifest.json

A tensor is named KIND/NAME@START: the fp32 elements from START on of the flattened parameter NAME, or of one of its
optimizer moments. A run with any number of ranks reads the slices that it needs, whatever number of ranks wrote them.
A folder without a valid manifest is not a checkpoint. RUN and LAUNCH identify the files of a run, and of one launch.
Locations are strings: a folder's path or s3://BUCKET/PREFIX.
"""
