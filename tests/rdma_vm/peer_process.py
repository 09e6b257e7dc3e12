"""``rota peer`` as a process of its own (without loading the rest of the command line)."""

from __future__ import annotations

import argparse
import logging
import sys

from rota.rdma.peercli import add_peer_parser, run_peer


class Lines:
    """A console that writes plain lines at once."""

    def print(self, *objects: object) -> None:
        print(*objects, flush=True)


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    parser = argparse.ArgumentParser()
    add_peer_parser(parser.add_subparsers(dest="command"))
    return run_peer(parser.parse_args(["peer", *sys.argv[1:]]), Lines())


if __name__ == "__main__":
    sys.exit(main())
