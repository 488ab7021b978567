"""The people, places and things of the stories: tables with a row for each choice."""

Part = dict[str, str]
Table = tuple[Part, ...]


def _table(fields: str, *rows: tuple[str, ...]) -> Table:
    """Name the fields of rows, for `{thing.look}` in a template."""
    return tuple(dict(zip(fields.split(), row, strict=True)) for row in rows)


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _names(*names: str) -> Table:
    return tuple({"name": name} for name in names)


PRONOUNS = {
    "she": {"he": "she", "him": "her", "his": "her", "himself": "herself"},
    "he": {"he": "he", "him": "him", "his": "his", "himself": "himself"},
}
SHE, HE = PRONOUNS["she"], PRONOUNS["he"]

# Each name is in one list only, so that it determines the pronoun.
NAMES = {
    ("people", "she"): _words(
        "Lily Mia Nora Anna Ella Clara Ruby Molly Alice Emma Lucy Hannah Ivy Zoe Wendy Greta"
    ),
    ("people", "he"): _words(
        "Tom Ben Max Sam Leo Jack Finn Oscar Hugo Noah Peter Theo Felix Otto Henry Paul"
    ),
    ("animals", "she"): _words(
        "Bella Pepper Luna Poppy Clover Penny Tilly Dot Minnie Fern Coco Mimi"
    ),
    ("animals", "he"): _words(
        "Bruno Pip Bramble Rusty Barnaby Otis Basil Patch Chester Biscuit Fergus Rufus"
    ),
}
# The hero also determines the relative in a story.
FAMILY = {
    ("people", "she"): "grandmother",
    ("people", "he"): "father",
    ("animals", "she"): "aunt",
    ("animals", "he"): "big brother",
}
SPECIES = _words(
    "rabbit mouse fox bear squirrel hedgehog badger otter duck frog mole owl beaver kitten puppy "
    "lamb goat pony turtle raccoon"
)

# fmt: off
PLACES = _table(
    "name where spot far hidden",
    ("village", "in a little village by the sea", "the beach", "the old lighthouse",
     "the cave behind the rocks"),
    ("farm", "on a farm at the edge of the woods", "the barn", "the windmill on the hill",
     "the hollow oak in the far field"),
    ("town", "in a small town full of crooked houses", "the market square", "the clock tower",
     "the archway behind the bakery"),
    ("forest", "in a deep green forest", "the clearing", "the waterfall",
     "the mossy cave under the roots"),
    ("hill", "on a hill covered with flowers", "the apple orchard", "the stone bridge",
     "the hut of white stones"),
    ("river", "in a cottage beside a river", "the muddy bank", "the water mill",
     "the empty hut among the reeds"),
    ("valley", "in a quiet valley between two mountains", "the meadow", "the old castle",
     "the dark tunnel in the hillside"),
    ("lake", "in a wooden house beside a blue lake", "the shore", "the boathouse",
     "the hollow under the willow trees"),
    ("mountain", "in a village high up in the mountains", "the well", "the snowy pass",
     "the crack in the cliff"),
    ("island", "on a sunny island far out in the sea", "the harbor", "the tall palm tree",
     "the cave beside the lagoon"),
    ("garden", "in a house with a big wild garden", "the rose bushes", "the pond",
     "the shed covered with ivy"),
    ("city", "in a noisy city with a hundred bridges", "the park", "the train station",
     "the cellar behind the library"),
)

ELDERS = tuple(
    {"name": f"Mrs. {name}", "job": job} | SHE
    for name, job in (
        ("Plum", "baker"), ("Thistle", "gardener"), ("Button", "tailor"), ("Marsh", "weaver"),
        ("Hopper", "teacher"), ("Quill", "librarian"),
    )
) + tuple(
    {"name": f"Mr. {name}", "job": job} | HE
    for name, job in (
        ("Finch", "miller"), ("Barley", "farmer"), ("Cork", "fisherman"), ("Bell", "clockmaker"),
        ("Pine", "carpenter"), ("Boots", "shoemaker"),
    )
)

# Something small and dear: `use` is what its owner does with it.
KEEPSAKES = _table(
    "name look use",
    ("whistle", "silver", "played a tune on it"),
    ("kite", "red", "flew it above the roofs"),
    ("button", "golden", "polished it"),
    ("scarf", "striped", "wore it around the neck"),
    ("drum", "little tin", "played it from breakfast to lunch"),
    ("marble", "blue glass", "held it up to the light"),
    ("hat", "green felt", "wore it"),
    ("key", "rusty old", "wondered which door it opened"),
    ("music box", "painted", "listened to its song"),
    ("ball", "yellow", "threw it high into the air"),
    ("lantern", "brass", "lit it"),
    ("blanket", "soft woolen", "slept under it"),
    ("compass", "copper", "watched its needle swing"),
    ("spoon", "carved wooden", "ate porridge with it"),
    ("shell", "pink", "listened to the sea in it"),
    ("doll", "rag", "told it a secret"),
)

# Something to build: the part that fails, what goes wrong, what mends it, and what it is good for.
PROJECTS = _table(
    "name from fails mends use",
    ("raft", "four logs", "The logs floated apart", "a long rope",
     "floated all the way down the river"),
    ("tree house", "old planks", "The floor cracked in the middle", "a thick beam",
     "looked out over the whole world"),
    ("cart", "two crates", "One wheel rolled away", "a strong iron pin",
     "rolled down the hill"),
    ("swing", "a flat board", "The knot came loose", "a long rope", "swung up to the leaves"),
    ("kite", "paper and sticks", "The paper tore in the wind", "a piece of cloth",
     "watched it dance among the clouds"),
    ("bridge", "fallen branches", "The branches slid into the water", "a ball of wire",
     "walked across with dry feet"),
    ("sled", "barrel boards", "A board broke in two", "a sheet of tin",
     "slid down the grassy slope"),
    ("birdhouse", "an old box", "The roof fell off", "a bag of nails",
     "listened to the first bird sing inside"),
    ("puppet theater", "a big basket", "The curtain fell down", "a piece of cloth",
     "gave a show for all the neighbors"),
    ("windmill", "a tin can and feathers", "The wings would not turn", "a drop of oil",
     "watched the wings go round and round"),
)

# A contest: `doing` is the training, `go` the start, `slip` what happens to somebody else.
CONTESTS = _table(
    "name doing go slip mend",
    ("running race", "ran up and down the lane", "Everyone ran as fast as the wind",
     "tripped over a root and hurt a knee", "tied a handkerchief around the sore knee"),
    ("boat race", "rowed from one side of the water to the other", "Oars splashed on every side",
     "dropped an oar into the water", "fished the oar out again"),
    ("kite contest", "practiced with a long string", "A dozen kites jumped into the sky",
     "got the string caught in a tree", "climbed up and freed the string"),
    ("baking contest", "baked one cake after another", "Flour flew through the air",
     "spilled all the milk", "shared the last cup of milk"),
    ("sack race", "hopped around the yard in a potato sack", "Everyone hopped and wobbled",
     "fell over with a bump", "pulled and pulled until both were standing"),
    ("snail race", "fed a snail the freshest leaves", "The snails set off, very slowly",
     "could not find the snail any more", "searched the grass until the snail was found"),
    ("sandcastle contest", "built one tower after another", "Buckets clattered everywhere",
     "broke the only bucket", "lent out a good bucket"),
    ("singing contest", "sang to the cows in the barn", "One song followed another",
     "forgot the words", "whispered the next line"),
)

TREASURES = _table(
    "name then",
    ("a chest full of old picture books", "read a new book every evening"),
    ("a jar of golden coins", "bought a new roof for the school"),
    ("a box of colored chalk", "drew pictures on every wall in the lane"),
    ("a bag of flower seeds", "planted flowers along the road"),
    ("a silver flute", "played music at every party"),
    ("a basket of sparkling stones", "gave one stone to each of the neighbors"),
    ("a tin of very old toffee", "sucked toffee on every long walk"),
    ("a golden telescope", "looked at the moon every night"),
    ("a crown made of shells", "took turns being king or queen"),
    ("a tiny wooden ship", "sailed it on every puddle"),
)

# What a sick or hungry neighbor needs, where it comes from and how it is made ready.
REMEDIES = _table(
    "name bare gather make",
    ("onion soup", "soup", "onions and carrots", "chopped and stirred until the pot bubbled"),
    ("mint tea", "tea", "fresh mint leaves", "boiled the water and waited for the steam"),
    ("a honey cake", "cake", "honey from the wild bees", "beat the eggs and buttered the pan"),
    ("warm bread", "bread", "flour and yeast", "kneaded the dough until it was soft"),
    ("an apple pie", "pie", "sweet red apples", "rolled the dough and sliced the apples"),
    ("vegetable broth", "broth", "herbs and celery", "let the broth simmer for an hour"),
    ("berry jam", "jam", "a bowl of ripe berries", "cooked the berries with sugar"),
    ("pumpkin stew", "stew", "a fat orange pumpkin", "cut the pumpkin into cubes"),
)

# A promise, the distraction and the damage; the apology repeats all three.
PROMISES = _table(
    "name done harm mend",
    ("water the tomatoes", "watered the tomatoes", "the tomatoes hung brown and dry",
     "planted new tomatoes in a sunny row"),
    ("feed the hens", "fed the hens", "the hens were hungry and had laid no eggs",
     "brought the hens a whole sack of corn"),
    ("close the gate", "closed the gate", "the sheep had run away into the hills",
     "brought the sheep home one by one"),
    ("bring in the washing", "brought in the washing", "the clean sheets lay in the mud",
     "washed the sheets until they were white"),
    ("watch the bread in the oven", "watched the bread", "the bread was as black as coal",
     "baked a new loaf with raisins"),
    ("take care of the boat", "taken care of the boat", "the boat had drifted away",
     "rowed the boat back to its place"),
    ("mend the fence", "mended the fence", "the goats had eaten all the cabbages",
     "mended the fence and planted new cabbages"),
    ("post the letter", "posted the letter", "the letter was still lying on the table",
     "carried the letter all the way on foot"),
)

# A skill: how it fails, the teacher's advice, and how it succeeds.
SKILLS = _table(
    "name fails advice works",
    ("swim", "sank like a stone", "Kick with your legs and trust the water",
     "swam like a little fish"),
    ("whistle", "blew nothing but air", "Wet your lips and blow softly",
     "whistled as clearly as a blackbird"),
    ("walk on stilts", "fell flat into the mud", "Look ahead and take small steps",
     "strode about like a stork"),
    ("juggle", "dropped every ball", "Watch the balls and not your hands",
     "kept three balls in the air"),
    ("bake bread", "made a loaf as hard as a brick", "Give the dough time to rise",
     "baked a loaf as soft as a cloud"),
    ("play the fiddle", "made it squeak like a mouse", "Hold the bow gently, like a feather",
     "played so well that people danced"),
    ("row a boat", "went round in circles", "Pull with both arms at the same time",
     "rowed straight across the water"),
    ("paint", "made a big gray blot", "Look for a long time before you begin",
     "painted a sunset full of gold"),
    ("dance", "tripped over every step", "Listen to the music and count to four",
     "danced as lightly as a leaf"),
    ("sew", "pricked every finger", "Make small stitches and do not hurry",
     "sewed a shirt with a pocket"),
    ("climb a rope", "slid down again", "Hold the rope with your feet, too",
     "climbed right up to the top"),
)

# A noise in the dark and what makes it: the name is the noise, the cause is friendly.
NOISES = _table(
    "name cause small",
    ("scratch, scratch", "a tiny hedgehog looking for a warm place", "hedgehog"),
    ("tap, tap, tap", "a moth that wanted to reach the light", "moth"),
    ("hoo, hoo", "a young owl that had lost its way", "owl"),
    ("drip, drip, drip", "a frog that had climbed out of the rain barrel", "frog"),
    ("rustle, rustle", "a mouse making a bed out of paper", "mouse"),
    ("squeak, squeak", "a bat hanging from the old shutter", "bat"),
    ("thump, thump", "a rabbit dancing in the moonlight", "rabbit"),
    ("creak, creak", "a squirrel swinging on the garden gate", "squirrel"),
)

# A seed and what becomes of it.
PLANTS = _table(
    "name grows feast",
    ("bean", "a stalk as tall as the chimney", "a big pot of beans"),
    ("pumpkin seed", "a pumpkin as big as a wagon", "pumpkin soup from a huge pot"),
    ("sunflower seed", "a sunflower as bright as the sun", "roasted seeds by the fire"),
    ("cherry stone", "a little tree with white blossoms", "a bowl of sweet cherries"),
    ("melon seed", "a round green melon", "cool slices of melon"),
    ("strawberry seed", "a bush full of red strawberries", "strawberries with cream"),
    ("corn seed", "a row of golden corn", "hot corn with butter"),
    ("apple seed", "a young tree with one shining apple", "a warm apple cake"),
)

# A lost baby animal, its cry, and the mother.
BABIES = _table(
    "name cry mother home",
    ("duckling", "peeped", "duck", "the pond among the reeds"),
    ("chick", "cheeped", "hen", "the henhouse"),
    ("fawn", "bleated", "deer", "the edge of the forest"),
    ("kid", "bleated", "goat", "the steep green slope"),
    ("gosling", "hissed and peeped", "goose", "the river bend"),
    ("piglet", "squealed", "sow", "the old sty"),
    ("foal", "neighed", "mare", "the wide pasture"),
    ("calf", "mooed", "cow", "the clover field"),
    ("owlet", "hooted", "owl", "the hollow elm"),
    ("bear cub", "whimpered", "bear", "the den under the pines"),
)

# Bad weather, from its first sign to the morning after.
STORMS = _table(
    "name sign comes after",
    ("rain", "Dark clouds rolled over the sky", "Rain poured down and puddles filled the road",
     "The ground was wet and every leaf dripped"),
    ("wind", "The trees began to sway", "A wild wind howled around the walls",
     "Branches and leaves lay everywhere"),
    ("snow", "The air turned white and cold", "Snow fell thick and fast and covered the path",
     "The snow lay deep and bright in the sun"),
    ("thunder", "The sky turned purple and black",
     "Thunder crashed and lightning lit up the hills", "The air smelled fresh and clean"),
    ("hail", "The birds grew quiet, one after another",
     "Hail as big as peas drummed on the roof", "White grains of ice melted in the grass"),
    ("fog", "A gray mist crept up from the ground", "Fog swallowed the houses, one by one",
     "Silver drops hung on every spider web"),
)

SWEETS = _names(
    "plum cake", "cookies", "pancakes with honey", "hot chocolate", "apple tart", "gingerbread",
    "blueberry muffins", "warm milk", "cinnamon rolls", "pear pie", "vanilla pudding",
)

# Where somebody is stuck, and what sets them free.
TRAPS = _table(
    "name tool how",
    ("in the mud", "a long board", "laid it across the mud"),
    ("in a hollow log", "a piece of soap", "made the log slippery"),
    ("in a hole in the fence", "a pair of pliers", "pulled out a nail"),
    ("in an empty barrel", "a hammer", "knocked off the iron hoop"),
    ("in a prickly hedge", "a pair of shears", "cut away the thorns"),
    ("between two rocks", "an iron bar", "pushed the rocks apart"),
    ("in a tiny window", "a pot of butter", "greased the frame all around"),
    ("under a heavy branch", "a saw", "cut the branch in half"),
)

# fmt: on

SEASONS = _names("spring", "summer", "autumn", "winter")
BIRDS = _names("crow", "robin", "swallow", "heron", "gull", "jay")
SMALL = _names("fox", "hedgehog", "squirrel", "badger", "rabbit", "kitten")

PARTS: dict[str, Table] = {
    "place": PLACES,
    "elder": ELDERS,
    "thing": KEEPSAKES,
    "project": PROJECTS,
    "contest": CONTESTS,
    "treasure": TREASURES,
    "remedy": REMEDIES,
    "promise": PROMISES,
    "skill": SKILLS,
    "noise": NOISES,
    "plant": PLANTS,
    "baby": BABIES,
    "storm": STORMS,
    "sweet": SWEETS,
    "trap": TRAPS,
    "season": SEASONS,
    "bird": BIRDS,
    "small": SMALL,
}
