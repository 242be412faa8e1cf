"""Who made a file: policies that load() enforces, signatures in the OpenSSF Model Signing format. Never imports torch.

``policy`` holds what is trusted, ``check`` compares a file with it, ``bundle`` signs and verifies with the package
``model-signing`` (the extra ``sign``), which is imported where a key, certificate or identity is used and nowhere else.
"""
