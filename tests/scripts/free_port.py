"""Finds a port of this machine at which nobody listens, for tests that start servers."""
import socket


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
