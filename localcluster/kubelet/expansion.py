"""`$(NAME)` in commands, arguments and values, by Kubernetes' rules.

`$(NAME)` becomes the variable's value, `$$` a dollar sign (so `$$(NAME)` stays `$(NAME)`), and a
reference to an unknown variable stays as it is (k8s.io/kubernetes/third_party/forked/golang/expansion).
"""

import re
from collections.abc import Mapping

_TOKEN = re.compile(r"\$\$|\$\(([^)]*)\)")


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replace every reference once; values are not expanded again."""

    def value(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return variables.get(match[1], match[0])

    return _TOKEN.sub(value, text)
