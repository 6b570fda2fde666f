"""What a budget costs: in language modelling, and in finding again what stood in the context.

`tasks` makes prompts, `methods` compresses what a layer holds, `harness` runs methods on prompts, and `language`
measures predictions of a text.
"""

from ckv_compile.evaluation.language import Quality, evaluate, text_of

__all__ = ["Quality", "evaluate", "text_of"]
