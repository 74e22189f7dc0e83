# ruff: noqa: RUF001 — letters of many scripts
"""Languages are identified, with the scores of py3langid."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multihop.data_prep.rules.languages import CHARACTERS, identify, labels

SENTENCES = {
    "en": "The train was late again, so we walked home through the rain and talked about the summer.",
    "de": "Der Zug hatte wieder Verspätung, also gingen wir im Regen nach Hause und sprachen über den Sommer.",
    "fr": "Le train était encore en retard, alors nous sommes rentrés à pied sous la pluie en parlant de l'été.",
    "es": "El tren llegó tarde otra vez, así que volvimos a casa bajo la lluvia y hablamos del verano.",
    "it": "Il treno era di nuovo in ritardo, così siamo tornati a casa sotto la pioggia parlando dell'estate.",
    "nl": "De trein was weer te laat, dus liepen we door de regen naar huis en praatten we over de zomer.",
    "pl": "Pociąg znowu się spóźnił, więc wróciliśmy do domu w deszczu i rozmawialiśmy o lecie.",
    "fi": "Juna oli taas myöhässä, joten kävelimme sateessa kotiin ja puhuimme kesästä.",
    "tr": "Tren yine geç kaldı, biz de yağmurda eve yürüdük ve yaz hakkında konuştuk.",
    "ru": "Поезд снова опоздал, поэтому мы пошли домой под дождём и говорили о лете.",
    "el": "Το τρένο άργησε πάλι, γι' αυτό γυρίσαμε σπίτι με τα πόδια μέσα στη βροχή.",
    "ar": "تأخر القطار مرة أخرى، فمشينا إلى البيت تحت المطر وتحدثنا عن الصيف.",
    "hi": "रेलगाड़ी फिर देर से आई, इसलिए हम बारिश में पैदल घर गए और गर्मियों की बातें करते रहे।",
    "ja": "電車がまた遅れたので、私たちは雨の中を歩いて帰り、夏の話をしました。",
    "zh": "火车又晚点了，所以我们冒雨走回家，一路上谈论着夏天的事情。",
    "ko": "기차가 또 늦어서 우리는 비를 맞으며 집까지 걸어가면서 여름 이야기를 했다.",
}


@pytest.fixture(scope="module")
def reference():
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


@pytest.mark.parametrize("code", SENTENCES)
def test_a_sentence_is_enough(code):
    result, score = identify(SENTENCES[code])
    assert (result, score >= 0.5) == (code, True), score
    assert code in labels()


def test_capitals_are_read_as_small_letters():
    assert identify(SENTENCES["de"].upper())[0] == "de"


def test_of_a_long_text_only_the_beginning_is_read():
    assert identify(SENTENCES["fr"] * 50) == identify((SENTENCES["fr"] * 50)[:CHARACTERS] + SENTENCES["ru"] * 9)


def test_text_without_a_language_has_no_probable_one():
    for text in ("", "12345", "?!", "\n"):
        assert identify(text)[1] < 0.1


mixed = st.lists(st.sampled_from([word for text in SENTENCES.values() for word in text.split()]), max_size=40)


@given(text=mixed.map(" ".join) | st.text())
def test_scores_are_those_of_py3langid(reference, text):
    result, score = identify(text)
    expected = dict(reference.rank(text))
    assert score == pytest.approx(expected[result], abs=1e-3)
    assert expected[result] >= max(expected.values()) - 1e-3
