"""`mctf.Embedder`: the model's own vectors, whatever holds the images and wherever it was pickled."""

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import timm
import torch

import mctf
from helpers.families.hf_towers import HfTowers
from helpers.images import encode, make_picture
from mctf import Embedder, MctfError
from mctf.api import find_stack
from mctf.data import Preprocessing
from mctf.embedding.check import recall

PICTURES = [make_picture(seed) for seed in range(5)]
SETTINGS = {"random_weights": True, "image_size": (64, 64), "batch_size": 4}


@pytest.fixture(scope="module")
def embed() -> Embedder:
    return Embedder("test_vit", r=4, method="mctf", **SETTINGS)


def test_vectors_are_those_of_the_model() -> None:
    embed = Embedder("test_vit", r=0, **SETTINGS)
    model = embed.loaded.model
    transform = Preprocessing.of(model).transform()
    images = torch.stack([transform(picture) for picture in PICTURES[:4]])
    with torch.inference_mode():
        tokens = model.forward_features(images)
        expected = {
            "class": tokens[:, 0],
            "mean": tokens[:, 1:].mean(dim=1),
            "auto": model.forward_head(tokens, pre_logits=True),
            "logits": model.forward_head(tokens),
        }
    for vector, values in expected.items():
        given = Embedder("test_vit", r=0, vector=vector, **SETTINGS)(PICTURES[:4])
        assert np.array_equal(given, values.numpy()), vector


def test_the_mean_of_a_fused_model_is_that_of_every_patch() -> None:
    embed = Embedder("test_vit", r=4, method="mctf", vector="mean", **SETTINGS)
    model, transform = embed.loaded.model, embed.loaded.preprocessing.transform()
    with torch.inference_mode():
        tokens = model.forward_features(torch.stack([transform(picture) for picture in PICTURES[:4]]))
    assert tokens.shape[1] == 1 + (64 // 16) ** 2
    assert np.array_equal(embed(PICTURES[:4]), tokens[:, 1:].mean(dim=1).numpy())


def test_images_in_any_form(embed: Embedder, tmp_path: Path) -> None:
    expected = embed(PICTURES)
    assert expected.shape == (5, 64)
    contents = [encode(picture) for picture in PICTURES]
    paths = [tmp_path / f"{number}.png" for number in range(5)]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    arrays = np.stack([np.asarray(picture) for picture in PICTURES])
    for images in (contents, paths, list(map(str, paths)), list(arrays), arrays):
        assert np.array_equal(embed(images), expected)
    assert embed([]).shape == (0, 64)


def test_a_batch_of_columns(embed: Embedder) -> None:
    given = embed({"bytes": np.array([encode(picture) for picture in PICTURES], dtype=object), "id": np.arange(5)})
    assert given.keys() == {"id", "embedding"}
    assert np.array_equal(given["embedding"], embed(PICTURES))
    assert np.array_equal(embed({"image": np.stack(PICTURES)})["embedding"], embed(PICTURES))


def test_pickled_by_name(embed: Embedder) -> None:
    expected = embed(PICTURES)
    content = pickle.dumps(embed)
    assert len(content) < 2000
    assert np.array_equal(pickle.loads(content)(PICTURES), expected)


def test_normalized_and_in_half_precision() -> None:
    vectors = Embedder("test_vit", r=4, normalize=True, vector_dtype="fp16", **SETTINGS)(PICTURES)
    assert vectors.dtype == np.float16
    assert np.allclose(np.linalg.norm(vectors.astype(np.float32), axis=1), 1, atol=2e-3)


def test_top_classes() -> None:
    settings = SETTINGS | {"top_k": 3, "r": 0}
    given = Embedder("test_vit", **settings)({"image": PICTURES})
    logits = torch.from_numpy(Embedder("test_vit", **settings, vector="logits")(PICTURES))
    chosen = logits.softmax(dim=1).gather(1, torch.from_numpy(given["top_classes"]))
    assert torch.equal(chosen, torch.from_numpy(given["top_probabilities"]))


def test_the_projection_of_clip_has_no_classes() -> None:
    model = timm.create_model("test_vit", num_classes=48)
    model.pretrained_cfg = {**model.pretrained_cfg, "num_classes": 48}
    assert Embedder(model, r=0, vector="projection").loaded.facts["vector"] == "projection"
    for settings in ({"vector": "logits"}, {"top_k": 2}):
        with pytest.raises(MctfError, match="has no classifier"):
            Embedder(model, r=0, **settings)(PICTURES)
    classifiers = [timm.create_model("test_vit", num_classes=48) for _ in range(4)]
    for classifier in classifiers:
        classifier.pretrained_cfg = {**model.pretrained_cfg, "architecture": "vit_base_patch32_clip_224"}
    torch.nn.init.ones_(classifiers[0].head.bias)
    classifiers[1].pretrained_cfg["num_classes"] = 512  # another head than the published one
    classifiers[2].pretrained_cfg["label_names"] = ["cat"] * 48
    classifiers[3] = timm.create_model("test_vit")  # 1000 classes are those of ImageNet
    for classifier in classifiers:
        assert Embedder(classifier, r=0, top_k=2).loaded.facts["vector"] == "auto"
        with pytest.raises(MctfError, match="has no projection"):
            Embedder(classifier, r=0, vector="projection")(PICTURES)


def test_attention_pooling_of_a_classifier_is_no_projection() -> None:
    model = timm.create_model("test_vit", global_pool="map", class_token=False)
    assert Embedder(model, r=0, vector="attention")(PICTURES).shape == (5, 64)
    for classes in (1000, 0):
        model.reset_classifier(classes)
        with pytest.raises(MctfError, match="has no projection"):
            Embedder(model, r=0, vector="projection")(PICTURES)
    model.pretrained_cfg = {**model.pretrained_cfg, "num_classes": 0}  # published without a classifier, as SigLIP
    assert Embedder(model, r=0, vector="projection")(PICTURES).shape == (5, 64)


def test_the_class_token_of_cait_is_no_patch() -> None:
    model = timm.create_model("cait_xxs24_224", img_size=64, depth=2, embed_dim=48, num_heads=2).eval()
    embed = Embedder(model, r=0, vector="class", batch_size=5)
    transform = embed.loaded.preprocessing.transform()
    with torch.inference_mode():
        tokens = model.forward_features(torch.stack([transform(picture) for picture in PICTURES]))
    assert np.array_equal(embed(PICTURES), tokens[:, 0])
    assert np.array_equal(Embedder(model, r=0, vector="mean", batch_size=5)(PICTURES), tokens[:, 1:].mean(dim=1))
    assert Embedder(model, r=2, vector="mean")(PICTURES).shape == (5, 48)


def test_an_unreadable_image_is_refused_or_a_row_of_nan(embed: Embedder) -> None:
    with pytest.raises(MctfError, match="image 1 is not a readable image"):
        embed([PICTURES[0], b"nothing"])
    skipping = Embedder("test_vit", r=4, method="mctf", on_corrupt="skip", **SETTINGS)
    vectors = skipping([PICTURES[0], b"nothing"])
    assert np.isnan(vectors[1]).all()
    assert np.isfinite(vectors[0]).all()
    skipping = Embedder("test_vit", r=0, on_corrupt="skip", top_k=2, **SETTINGS)
    columns = skipping({"image": [PICTURES[0], b"nothing"]})
    assert np.isnan(columns["top_probabilities"][1]).all()
    assert columns["top_classes"][1].tolist() == [-1, -1]
    assert (columns["top_classes"][0] >= 0).all()


@pytest.mark.parametrize("kind", ["CLIP", "Siglip"])
def test_projections_of_transformers(kind: str, tmp_path: Path) -> None:
    model = clip(kind)
    model.save_pretrained(tmp_path)
    embed = Embedder(f"hf:{tmp_path}", r=0, vector="projection", batch_size=5)
    transform = embed.loaded.preprocessing.transform()
    with torch.inference_mode():
        features = model.get_image_features(pixel_values=torch.stack([transform(picture) for picture in PICTURES]))
    features = getattr(features, "pooler_output", features)
    assert torch.equal(torch.from_numpy(embed(PICTURES)), features)
    assert Embedder(f"hf:{tmp_path}", r=4, vector="mean")(PICTURES).shape == (5, 32)
    assert Embedder(f"hf:{tmp_path}", r=4)(PICTURES).shape == features.shape


def test_without_class_token_and_pooling_the_mean_stands_for_an_image(tmp_path: Path) -> None:
    model = clip("Siglip", vision_use_head=False)
    model.save_pretrained(tmp_path)
    mean = Embedder(f"hf:{tmp_path}", r=0, vector="mean")(PICTURES)
    assert np.array_equal(Embedder(f"hf:{tmp_path}", r=0)(PICTURES), mean)
    for vector in ("attention", "projection", "class"):
        with pytest.raises(MctfError, match="has no"):
            Embedder(f"hf:{tmp_path}", r=0, vector=vector)(PICTURES)


@pytest.mark.parametrize("name", ["pixtral", "videomae", "vivit", "ast", "qwen3_vl", "siglip2", "vitpose"])
def test_towers_without_a_vector_per_image_are_named(name: str, tmp_path: Path) -> None:
    model = HfTowers.builders[name]()
    model.save_pretrained(tmp_path)
    with pytest.raises(MctfError, match=r"transformers\.models\..*: fuse it with mctf\.fuse\(model\)"):
        Embedder(f"hf:{tmp_path}", r=0)(PICTURES)


def test_a_model_that_gives_fewer_vectors_than_images_is_refused() -> None:
    embed = Embedder("test_vit", r=0, **SETTINGS)
    read = embed.loaded.read
    embed._loaded = replace(embed.loaded, read=lambda pixels: (read(pixels)[0][:1],))
    with pytest.raises(MctfError, match="the model gives 1 vectors for 4 images"):
        embed(PICTURES[:4])


@pytest.mark.parametrize("name", ["idefics3", "smolvlm", "blip", "blip_2", "owlvit", "clipseg", "aimv2", "ijepa"])
def test_towers_saved_alone(name: str, tmp_path: Path) -> None:
    model = HfTowers.builders[name]()
    model.save_pretrained(tmp_path)
    assert Embedder(f"hf:{tmp_path}", r=4)(PICTURES).shape == (5, 32)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"vector": "attention"}, "has no attention pooling"),
        ({"vector": "projection"}, "has no projection"),
        ({"vector": "nonsense"}, "vector"),
        ({"top_k": 5000}, "--top-k 5000 needs"),
        ({"r": 4, "flops": 0.5}, "give one of them"),
        ({"method": "no_such"}, "no_such"),
        ({"dtype": "int8"}, "dtype"),
        ({"device": "nonsense"}, "nonsense"),
        ({"method": "ats", "compile": True}, "leave out compile"),
    ],
)
def test_bad_settings_are_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(MctfError, match=says):
        Embedder("test_vit", **SETTINGS, **options)(PICTURES)


def test_one_image_belongs_into_a_list(embed: Embedder) -> None:
    with pytest.raises(MctfError, match="put the image into a list"):
        embed(PICTURES[0])
    with pytest.raises(MctfError, match="expected height x width x 3"):
        embed([np.zeros((4, 4))])
    with pytest.raises(MctfError, match="the batch has the columns x"):
        embed({"x": PICTURES})


def test_a_fused_model_stays_as_it_is() -> None:
    model = timm.create_model("test_vit").eval()
    mctf.fuse(model, "tome", r=4)
    assert Embedder(model).loaded.facts["method"] == "tome"
    for settings in ({"r": 2}, {"method": "ward"}, {"flops": 0.9}, {"blocks": [1]}, {"options": {"rounds": 8}}):
        with pytest.raises(MctfError, match=r"is fused already: leave out \w+, or mctf.unfuse"):
            Embedder(model, **settings)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_of_the_user_is_not_changed(dtype: str) -> None:
    model = timm.create_model("test_vit").train()
    Embedder(model, r=4, dtype=dtype, device="cpu")(PICTURES[:1])
    assert model.training
    assert {tensor.dtype for tensor in model.parameters()} == {torch.float32}
    assert find_stack(model) is None


def clip(kind: str, **features: object) -> object:
    """A tiny CLIP or SigLIP of transformers."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    vision = {**sizes, "image_size": 32, "patch_size": 8, **features}
    text = {**sizes, "vocab_size": 50, "max_position_embeddings": 8}
    more = {"projection_dim": 24} if kind == "CLIP" else {}
    config = getattr(transformers, f"{kind}Config")(vision_config=vision, text_config=text, **more)
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}Model")(config).eval()


PROCESSOR = {"size": {"height": 32, "width": 32}, "image_mean": [0.5] * 3, "image_std": [0.2] * 3, "resample": 3}


@pytest.mark.parametrize("kind", ["CLIP", "Siglip"])
def test_a_model_of_transformers_as_an_object(kind: str) -> None:
    import transformers

    model = clip(kind)
    for processor in (PROCESSOR, transformers.CLIPImageProcessor(**PROCESSOR, do_center_crop=False)):
        embed = Embedder(model, processor=processor, r=0, batch_size=5)
        transform = embed.loaded.preprocessing.transform()
        assert embed.loaded.preprocessing.std == (0.2,) * 3
        with torch.inference_mode():
            features = model.get_image_features(pixel_values=torch.stack([transform(each) for each in PICTURES]))
        features = getattr(features, "pooler_output", features)
        assert torch.equal(torch.from_numpy(embed(PICTURES)), features)
    assert pickle.loads(pickle.dumps(Embedder(model, processor=PROCESSOR, r=4)))(PICTURES).shape == features.shape
    assert find_stack(model) is None
    mctf.fuse(model, "tome", r=4)
    assert Embedder(model, processor=PROCESSOR).loaded.facts["method"] == "tome"
    with pytest.raises(MctfError, match="is fused already"):
        Embedder(model, processor=PROCESSOR, r=2)


@pytest.mark.parametrize(
    "features", [{}, {"final_ln_after_pool": True, "pool_type": "avg"}, {"attentional_pool": True}]
)
def test_a_model_of_open_clip_as_an_object(features: dict[str, object]) -> None:
    open_clip = pytest.importorskip("open_clip")
    from open_clip.transform import image_transform

    model = open_clip.transformer.VisionTransformer(
        32, 8, 32, 3, 2, 2.0, output_dim=16, attn_pooler_heads=2, **features
    )
    with pytest.raises(MctfError, match="has no record of its preprocessing: create it by open_clip"):
        Embedder(model)
    settings = {"size": 32, "mean": (0.5, 0.4, 0.3), "std": (0.2, 0.2, 0.3)}
    open_clip.model.set_model_preprocess_cfg(model.eval(), {**settings, "resize_mode": "shortest"})
    embed = Embedder(model, r=0, batch_size=5)
    prepare = image_transform(32, is_train=False, mean=settings["mean"], std=settings["std"])
    images = torch.stack([prepare(picture) for picture in PICTURES])
    with torch.inference_mode():
        expected = model(images).numpy()
        plain = not features
        tokens = model.ln_post(model.transformer(model._embeds(images))) if plain else None
    assert embed.loaded.facts["vector"] == "projection"
    assert np.allclose(embed(PICTURES), expected, atol=1e-5)
    assert Embedder(model, r=4, vector="mean")(PICTURES).shape == (5, 32)
    assert Embedder(model, r=4)(PICTURES).shape == expected.shape
    if tokens is not None:
        assert np.allclose(Embedder(model, r=0, vector="class")(PICTURES), tokens[:, 0], atol=1e-5)
        assert np.allclose(Embedder(model, r=0, vector="mean")(PICTURES), tokens[:, 1:].mean(dim=1), atol=1e-5)


def test_objects_that_give_no_vectors_are_refused_with_a_cure() -> None:
    transformers, open_clip = pytest.importorskip("transformers"), pytest.importorskip("open_clip")
    with pytest.raises(MctfError, match=r"transformers\.models\.clip\..*CLIPModel does not say .*pass processor="):
        Embedder(clip("CLIP"))
    with pytest.raises(MctfError, match="processor=function is no image processor"):
        Embedder(clip("CLIP"), processor=make_picture)
    with pytest.raises(MctfError, match="processor belongs to a model of transformers"):
        Embedder("test_vit", processor=PROCESSOR)
    with pytest.raises(MctfError, match="Linear is not a supported model"):
        Embedder(torch.nn.Linear(2, 2))
    tower = open_clip.model.ModifiedResNet([1, 1, 1, 1], 16, 4, 32, 8)
    with pytest.raises(MctfError, match=r"open_clip\..*ModifiedResNet has no VisionTransformer"):
        Embedder(tower)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    video = transformers.VideoMAEModel(transformers.VideoMAEConfig(**sizes, image_size=32, patch_size=8, num_frames=4))
    with pytest.raises(MctfError, match=r"videomae.*VideoMAEModel takes videos, not images: fuse it"):
        Embedder(video, processor=PROCESSOR)


@pytest.mark.slow
def test_padded_and_full_batches_share_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, compiler = [], torch.compile

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda run, **_options: compiler(run, backend=backend, dynamic=False))
    embed = Embedder("test_vit", r=0, compile=True, device="cpu", **SETTINGS)
    assert embed(PICTURES).shape == (5, 64)  # one batch of 4 and one that is padded
    assert len(graphs) == 1


def test_recall_counts_neighbors() -> None:
    generator = torch.Generator().manual_seed(0)
    unfused = torch.nn.functional.normalize(torch.randn(30, 8, generator=generator, dtype=torch.float64), dim=1)
    noise = torch.randn(30, 8, generator=generator, dtype=torch.float64)
    fused = torch.nn.functional.normalize(unfused + 0.3 * noise, dim=1)

    def nearest(query: torch.Tensor, base: torch.Tensor, index: int, k: int, *, itself: bool) -> set[int]:
        order = (base @ query).argsort(descending=True).tolist()
        return set([number for number in order if itself or number != index][:k])

    for k, result in recall(fused, unfused, [1, 10]).items():
        expected = {"among_others": 0, "with_query": 0, "mixed": 0}
        for index in range(30):
            truth = nearest(unfused[index], unfused, index, k, itself=False)
            expected["among_others"] += len(truth & nearest(fused[index], fused, index, k, itself=False))
            expected["mixed"] += len(truth & nearest(fused[index], unfused, index, k, itself=False))
            with_itself = nearest(unfused[index], unfused, index, k, itself=True)
            expected["with_query"] += len(with_itself & nearest(fused[index], fused, index, k, itself=True))
        for name, count in expected.items():
            assert getattr(result, name) == pytest.approx(count / (30 * k)), (k, name)
    assert recall(unfused, unfused, [1, 10])[10].among_others == 1
