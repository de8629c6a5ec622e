"""Let every client that is here leave in each of its ways, and print what the server heard."""

import argparse

from tests.clients.report import PAGE, table, versions
from tests.clients.run import ALL_CASES, run_case, what_lacks
from tests.support.page import rewrite
from tests.support.upstream import upstream


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__)
    parser.add_argument("--write", action="store_true", help="into docs/clients.md, too")
    arguments = parser.parse_args()
    with upstream() as plain, upstream(tls=True) as tls:
        servers = {"http": plain, "https": tls}
        news = {
            case: run_case(case, servers[case.scheme]) for case in ALL_CASES if not what_lacks(case)
        }
    text = f"{versions()}.\n\n{table(news)}"
    print(text)
    if arguments.write:
        rewrite(PAGE, text)


if __name__ == "__main__":
    main()
