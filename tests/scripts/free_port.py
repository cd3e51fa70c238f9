"""A port of this machine that nobody listens at, for tests that start servers."""
import socket


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
