"""The root worker of one host: it starts, restores, verifies, captures and stops engines.

It claims jobs from the shared store, restores snapshots inside namespaces of their own, proves by a canary that a replica
answers as its donor did, and only then opens traffic. It opens no port, and it never imports the gateway: the two meet in
the store, in the records that :mod:`policies` describes.
"""
