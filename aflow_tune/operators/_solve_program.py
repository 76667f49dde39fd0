"""Program in the sandbox: executes a model's `solution.py` and prints the result of its `solve()`.

What the program prints is the answer if `solve()` returns None, and is discarded otherwise. This
file is no security boundary: the program can print any answer it likes. Never imported.
"""

import contextlib
import io
import linecache
import sys
import traceback


def main() -> None:
    with open("solution.py", encoding="utf-8", errors="surrogatepass") as file:
        source = file.read()
    linecache.cache["solution.py"] = (len(source), None, source.splitlines(True), "solution.py")
    printed = io.StringIO()
    space: dict = {"__name__": "solution", "__file__": "solution.py"}
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(source, "solution.py", "exec"), space)
            answer = space["solve"]()
    except Exception as error:
        # Leave out the frames of this file.
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != "solution.py":
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace)
        raise SystemExit(1) from None
    text = printed.getvalue() if answer is None else str(answer)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
