"""The names of a model's classes."""

import timm

from mctf.models.class_names import class_labels


def test_the_config_names_the_classes_of_the_embedded_model() -> None:
    words = class_labels(timm.create_model("embedded"))
    assert len(words) == 200
    assert (words[0], words[30], words[199]) == ("goldfish", "tabby", "acorn")


def test_other_classes_than_those_of_the_config_have_numbers() -> None:
    assert class_labels(timm.create_model("embedded", num_classes=3)) == ("class 0", "class 1", "class 2")


def test_two_hundred_classes_of_another_model_have_numbers() -> None:
    assert class_labels(timm.create_model("test_vit", num_classes=200))[30] == "class 30"


def test_a_thousand_classes_are_imagenets() -> None:
    words = class_labels(timm.create_model("test_vit"))
    assert len(words) == 1000
    assert (words[0], words[281], words[999]) == ("tench", "tabby", "toilet tissue")


def test_labels_without_descriptions_stand_for_themselves() -> None:
    model = timm.create_model("test_vit", num_classes=2)
    model.pretrained_cfg = {**model.pretrained_cfg, "label_names": ("cat", "dog, any")}
    assert class_labels(model) == ("cat", "dog")
