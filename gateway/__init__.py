"""The HTTP front: it holds, forwards or refuses requests, and says what replicas are wanted.

Knows the store's contract (:mod:`policies.wire`) and nothing of how a replica is started. ``server``, ``dispatch``,
``downstream``, ``websocket`` and the fast path meet aiohttp's server, ``upstream`` its client, ``app`` and ``__main__`` put them
together; every decision lives in modules that know no HTTP library.
"""
