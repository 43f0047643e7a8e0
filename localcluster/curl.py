"""As much of curl as the probes of `deploy/base` use, for machines without one: -s -f -o FILE -H HEADER URL."""

import argparse
import http.client
import sys

_TIMEOUT_SECONDS = 30.0
_HTTP_ERROR, _NO_CONNECTION = 22, 7  # curl's exit codes


def main() -> int:
    parser = argparse.ArgumentParser(prog="curl")
    parser.add_argument("-s", action="store_true")
    parser.add_argument("-f", action="store_true")
    parser.add_argument("-o", metavar="FILE")
    parser.add_argument("-H", action="append", default=[], metavar="HEADER")
    parser.add_argument("url")
    options = parser.parse_args()
    headers = {name.strip(): value.strip() for name, _, value in (one.partition(":") for one in options.H)}
    host, _, path = options.url.removeprefix("http://").partition("/")
    connection = http.client.HTTPConnection(host, timeout=_TIMEOUT_SECONDS)
    try:
        connection.request("GET", f"/{path}", headers=headers)
        return 0 if connection.getresponse().status < 400 else _HTTP_ERROR
    except (OSError, http.client.HTTPException):
        return _NO_CONNECTION


if __name__ == "__main__":
    sys.exit(main())
