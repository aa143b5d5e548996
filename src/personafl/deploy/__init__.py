"""Devices and servers as processes of their own, over gRPC with mutual TLS.

    pki        who is who: certificates, and the list of those that are revoked
    identity   who is calling: read from the certificate, never from a message
    messages   what is said: typed, versioned, size-capped
    stream     how it travels: a header and chunks, resumable
    transport  gRPC: one method, `Exchange`, that everything goes through

    checks, journal, rounds, answering, server   the server's side
    state, device, serving                       the device's side
    tiers, cloudserver, coordination, coordinator   several servers, and who says when they go on

No algorithm code here: the server has the `ServerRule`, each device the `ClientRule`, its data and its state.
"""
