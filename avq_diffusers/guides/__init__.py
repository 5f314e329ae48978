"""Short guides and a glossary.

.. include:: images.md
.. include:: transformers.md
.. include:: vision.md
.. include:: glossary.md
"""
