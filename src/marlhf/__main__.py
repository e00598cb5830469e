"""`python -m marlhf`, which is also how torchrun starts it."""

from marlhf.cli import main

main()
