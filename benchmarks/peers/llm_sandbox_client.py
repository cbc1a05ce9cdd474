"""LLM Sandbox in an environment of its own: for each line of standard input one fresh sandbox, and the seconds it took.

python llm_sandbox_client.py IMAGE       DOCKER_HOST names the engine
"""

from __future__ import annotations

import sys
import time

from llm_sandbox import SandboxSession


def one(image: str) -> float:
    """Its own set-up of an environment, which takes minutes, is left out; a network it is not given either."""
    begun = time.perf_counter()
    with SandboxSession(
        lang="python", image=image, skip_environment_setup=True, runtime_configs={"network_mode": "none"}
    ) as session:
        said = session.run("print(6 * 7)").stdout
        took = time.perf_counter() - begun
    if said.strip() != "42":
        raise SystemExit(f"LLM Sandbox said {said!r}")
    return took


def main() -> None:
    for _ in sys.stdin:
        print(one(sys.argv[1]), flush=True)


if __name__ == "__main__":
    main()
