"""Short guides and a glossary.

.. include:: images.md
.. include:: transformers.md
.. include:: vision.md
.. include:: parallel.md
.. include:: glossary.md
"""
