"""Speech models: their methods, front end, vocabulary and prompt in one package that ``untorch.speech`` runs."""
