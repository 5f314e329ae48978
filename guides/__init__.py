"""Short guides and a glossary; everything in them is also a file of the repository's `guides`.

.. include:: images.md
.. include:: transformers.md
.. include:: vision.md
.. include:: training.md
.. include:: evaluation.md
.. include:: glossary.md
"""
