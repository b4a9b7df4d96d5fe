"""`tangram serve http`: programs and rewards for clients that speak HTTP."""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

    from .. import Client, TangramError

_LOOK_S = 1.0  # between two looks whether the broker is gone for good


def add(verbs: Any) -> None:
    """Adds this verb to the command line."""
    p = verbs.add_parser("serve", help="serve programs over HTTP (SandboxFusion, reward URLs)")
    kinds = p.add_subparsers(dest="kind", metavar="KIND", required=True)
    h = kinds.add_parser("http", help="run_code and reward URLs; prints one JSON line with url and "
                                      "key")
    h.add_argument("--access", metavar="FILE",
                   help="access file (default: TANGRAM_ACCESS, else the job's file)")
    h.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    h.add_argument("--port", type=int, default=0, help="port to listen on (default: any free one)")
    h.add_argument("--unix", default="", metavar="PATH", help="listen on a Unix socket instead")
    h.add_argument("--tls-cert", default="", metavar="FILE", help="certificate chain, as PEM")
    h.add_argument("--tls-key", default="", metavar="FILE", help="key of the certificate, as PEM")
    h.add_argument("--keys", type=Path, metavar="FILE",
                   help="file with a name and a key a line (default: one new key, printed)")
    h.add_argument("--image", default="", help="image in which programs run (default: none)")
    h.add_argument("--reward", action="append", default=[], metavar="NAME=MODULE:FUNCTION",
                   help="reward function for /reward/NAME, repeatable; MODULE may be a FILE.py")
    h.add_argument("--e2b-template", action="append", default=[], metavar="NAME=IMAGE",
                   help="image of an E2B template, repeatable; `base` has the image of --image")
    h.add_argument("--e2b-images", action="append", default=[], metavar="PATTERN",
                   help="images that E2B clients may name themselves, as a shell pattern, "
                        "repeatable (default: none)")
    h.add_argument("--e2b-image-key", default="image", metavar="KEY",
                   help="key of a sandbox's metadata that names its image (default: image)")
    h.add_argument("--e2b-network", action="store_true",
                   help="give E2B sandboxes the node's network, unless their client declines it")
    h.add_argument("--e2b-longest", type=int, default=86400, metavar="SECONDS",
                   help="longest life of an E2B sandbox (default: 86400)")
    h.add_argument("--lifeline", type=int, default=-1, help=argparse.SUPPRESS)
    p.set_defaults(go=go)


def go(args: argparse.Namespace) -> int:
    """Serves until SIGTERM or until the broker ends; returns the exit status."""
    missing = [name for name in ("fastapi", "uvicorn") if not importlib.util.find_spec(name)]
    if missing:
        from ..errors import MissingExtra, how_to_install

        raise MissingExtra(f"serve http needs {' and '.join(missing)}; {how_to_install('http')}")
    import asyncio

    from .. import connect
    from ..app.broker_location import find_access
    from ..app.loop import watch_lifeline
    from ..http_api.app import make_app
    from ..http_api.e2b.images import read_options
    from ..http_api.e2b.records import RecordFolder
    from ..http_api.e2b.sandboxes import SandboxRegistry
    from ..http_api.keys import ClientKeys, new_key, read_keys
    from ..http_api.rewards import load_function
    from ..http_api.server import Where, serve

    where = Where(args.host, args.port, args.unix, args.tls_cert, args.tls_key)
    options = read_options(args.image, args.e2b_template, args.e2b_images, args.e2b_image_key,
                           args.e2b_network, args.e2b_longest)
    rewards = {name: load_function(text) for name, text in map(_reward, args.reward)}
    key = "" if args.keys else new_key()
    keys = read_keys(args.keys) if args.keys else {"client": key}
    if args.access:
        os.environ["TANGRAM_ACCESS"] = args.access

    with connect(name="http") as client:
        records = RecordFolder(find_access(os.environ).parent / "e2b")
        sandboxes = SandboxRegistry(client, options, records)
        app = make_app(client, ClientKeys(keys), image=args.image, rewards=rewards,
                       sandboxes=sandboxes)

        def watch(loop: asyncio.AbstractEventLoop, stop: Callable[[], None]) -> None:
            sandboxes.begin(loop)
            if args.lifeline >= 0:
                watch_lifeline(loop, args.lifeline, stop)
            _end_with_broker(loop, client, stop)

        async def serve_and_leave() -> TangramError | None:
            try:
                await serve(app, where, key, watch, sandboxes.leave)
            finally:
                failure = client.failure
                # the client's thread calls back into this loop, also for what ends with the client
                await asyncio.to_thread(client.close)
                await sandboxes.settled()
            return failure

        failure = asyncio.run(serve_and_leave())
        if failure is not None:
            raise failure
    return 0


def _end_with_broker(loop: asyncio.AbstractEventLoop, client: Client, stop: Callable[[], None]
                     ) -> None:
    """Ends the server once its client has lost the broker for good."""
    if client.failure is not None:
        return stop()
    loop.call_later(_LOOK_S, _end_with_broker, loop, client, stop)


def _reward(text: str) -> tuple[str, str]:
    """The two parts of NAME=MODULE:FUNCTION. Raises InvalidInput."""
    from ..errors import InvalidInput

    name, equals, function = text.partition("=")
    if not equals or not name.isidentifier():
        raise InvalidInput(f"--reward: {text!r:.80} is not NAME=MODULE:FUNCTION")
    return name, function
