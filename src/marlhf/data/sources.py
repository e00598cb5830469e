"""Every source of rows. A new one is a file and a line below, which names its `Source`."""

from marlhf.data.code import APPS as APPS
from marlhf.data.code import HUMANEVAL as HUMANEVAL
from marlhf.data.code import MBPP as MBPP
from marlhf.data.code import TOY_CODE as TOY_CODE
from marlhf.data.gsm8k import GSM8K as GSM8K
from marlhf.data.guess import GUESSING as GUESSING
from marlhf.data.preferences import CNN_DAILYMAIL as CNN_DAILYMAIL
from marlhf.data.preferences import HH as HH
from marlhf.data.preferences import TLDR as TLDR
from marlhf.data.preferences import WEBGPT as WEBGPT
from marlhf.data.rows import Source
from marlhf.data.sums import SUMS as SUMS
from marlhf.data.sums import SUMS_STEPS as SUMS_STEPS
from marlhf.data.toy import TOY as TOY

SOURCES = {each.name: each for each in list(vars().values()) if isinstance(each, Source)}
PUBLISHED = {name: each for name, each in SOURCES.items() if each.hub_name}
"""Data sets in the form in which their authors published them."""
