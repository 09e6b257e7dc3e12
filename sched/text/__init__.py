"""Text in and out: tokenizer, chat template, incremental detokenizer, stop strings.

Owns everything that is text in the engine; the core sees token ids only. Nothing here touches a
device, a clock (but for the one a chat template asks for) or the network.
"""

from .chat import ChatTemplate
from .detokenizer import IncrementalDetokenizer
from .stop import StopMatcher
from .tokenizer import TextLimits, Tokenizer

__all__ = ["ChatTemplate", "IncrementalDetokenizer", "StopMatcher", "TextLimits", "Tokenizer"]
