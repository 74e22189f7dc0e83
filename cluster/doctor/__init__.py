"""What is wrong with a cluster, before a big job: `facts` of each node are gathered, and `findings` judge them."""
