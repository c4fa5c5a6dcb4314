"""A machine without the optional packages and without a network: start Python with this folder on PYTHONPATH.

Hidden packages are as if not installed. Connections and name look-ups fail at once, except on this machine itself,
which a Jupyter kernel needs. Child processes inherit it with the environment.
"""

import importlib.machinery
import ipaddress
import socket
import sys

HIDDEN = frozenset({"triton", "torchvision", "datasets", "tokenizers", "transformers"})

_find_spec = importlib.machinery.PathFinder.find_spec
_connect, _connect_ex, _sendto = socket.socket.connect, socket.socket.connect_ex, socket.socket.sendto
_getaddrinfo = socket.getaddrinfo


def _visible_spec(fullname, path=None, target=None):
    return None if fullname.partition(".")[0] in HIDDEN else _find_spec(fullname, path, target)


def _is_here(host) -> bool:
    """Whether a host is this machine; also None and "", which mean any address of it."""
    if isinstance(host, bytes):
        host = host.decode("ascii", "replace")
    if not host or host in ("localhost", socket.gethostname()):
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _refuse(what) -> None:
    raise OSError(101, f"Network is unreachable (offline test, {what!r})")


def _check(self, address) -> None:
    if self.family in (socket.AF_INET, socket.AF_INET6) and not _is_here(address[0]):
        _refuse(address)


def connect(self, address):
    _check(self, address)
    return _connect(self, address)


def connect_ex(self, address):
    _check(self, address)
    return _connect_ex(self, address)


def sendto(self, data, *rest):
    _check(self, rest[-1])
    return _sendto(self, data, *rest)


def getaddrinfo(host, *args, **kwargs):
    if not _is_here(host):
        raise socket.gaierror(socket.EAI_AGAIN, f"Temporary failure in name resolution (offline test, {host!r})")
    return _getaddrinfo(host, *args, **kwargs)


importlib.machinery.PathFinder.find_spec = staticmethod(_visible_spec)
socket.socket.connect, socket.socket.connect_ex, socket.socket.sendto = connect, connect_ex, sendto
socket.getaddrinfo = getaddrinfo
for _name in HIDDEN & set(sys.modules):
    raise RuntimeError(f"{_name} was imported before it could be hidden")
