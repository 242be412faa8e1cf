"""Recipe for text to image: text encoders, denoiser and decoder as methods. ``pipelines.py`` lists the pipelines."""
