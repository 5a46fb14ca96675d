"""Replicas behind Ray Serve: `python -m draftwood.ray --model … --replicas 2`, or `deployment.application` from Python.

A front takes requests in and sends each to the replica that has most likely seen the beginning of its prompt; replicas
are whole servers of ours without a socket. Needs `pip install 'draftwood[serve,ray]'`.
"""
