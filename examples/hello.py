"""The smallest play.

playledger run examples/hello.py:hello --input '"world"'
"""

from playledger import Run, play


@play
async def hello(run: Run, name: str) -> str:
    run.log("greeting", attempt=run.attempt)
    return f"hello, {name}"
