"""The playground as a Hugging Face Space: the model that comes with mctf, on the photographs of its demo."""

from functools import partial

from mctf.models.loading import load_model
from mctf.viz.playground import build, serve

page = build({"embedded": partial(load_model, "embedded")})

if __name__ == "__main__":
    serve(page)
