"""Devices and servers as processes of their own, over gRPC with mutual TLS.

    pki        who is who: certificates, and the list of those that are revoked
    identity   who is calling: read from the certificate, never from a message
    messages   what is said: typed, versioned, size-capped
    stream     how it travels: a header and chunks, resumable
    transport  gRPC: one method, `Exchange`, that everything goes through

    net/       the last four, and payload: what another machine sent is checked before it touches anything
    server/    opening, history, rounds, service, server            one server
               agreement, cloudserver, coordination, coordinator    several, and who says when they go on
    device/    datafile, training, state, device, serving           a device; it imports nothing of a server
               dealing                                              one file of data for each of them

No algorithm code here: a server is a `ServerSide`, each device a `ClientSide` with its data and its state.
"""
