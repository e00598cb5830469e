"""Which of two responses is better, by a language model, a reward model or people."""
