"""Short guides and a glossary, also readable as files in the repository's `guides`.

.. include:: images.md
.. include:: transformers.md
.. include:: vision.md
.. include:: training.md
.. include:: evaluation.md
.. include:: glossary.md
"""
