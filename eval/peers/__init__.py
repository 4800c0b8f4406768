"""Other projects' ordering, each in a process and an environment of its own."""

from ragorder.eval.peers.environment import PEERS, Peer, PeerError, prepare_peer
from ragorder.eval.peers.policy import PeerPolicy, make_peer

__all__ = ["PEERS", "Peer", "PeerError", "PeerPolicy", "make_peer", "prepare_peer"]
