"""Make a fresh sandbox of LLM Sandbox for each line of standard input, and print the seconds that it took.

python llm_sandbox_client.py IMAGE       DOCKER_HOST names the engine
"""

from __future__ import annotations

import sys
import time

from llm_sandbox import SandboxSession


def one(image: str) -> float:
    """Run one sandbox without a network and without LLM Sandbox's set-up of an environment, which takes minutes."""
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
