"""What clients and operators do wrong: each is answered, and the rest keeps serving."""
