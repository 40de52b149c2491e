"""The HTTP front: it holds, forwards or refuses requests, and says what replicas are wanted.

Knows the store's contract (:mod:`policies.wire`) and nothing of how a replica is started. ``app``, ``proxy`` and
``__main__`` alone know aiohttp's server; every decision lives in modules that know nothing of HTTP.
"""
