"""The whole of dcpstore on one machine: train, save to a bucket, resume elsewhere.

``dcpstore demo`` (``make demo``) does, and checks, in this order:

1. starts an S3 server of its own and makes a bucket in it
2. trains a small transformer under FSDP2 on 4 processes, saving half way
3. starts a new job on 2 processes, loads, compares every bit, and resumes
4. starts a new job on 4 processes and does the same
5. prints what lies in the bucket, the loss curves side by side, and a verdict

It exits with 1 if any comparison fails. Nothing of it stays behind.
"""
