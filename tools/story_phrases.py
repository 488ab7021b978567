"""Phrases that several plots share: `<rule>` in a template chooses a line of its table."""

RULES: dict[str, tuple[str, ...]] = {
    "opening": ("[3*<once>|<plain_opening>] [|{He} <hobby>.]",),
    "once": (
        "Once upon a time, there [was|lived] a <kindly> {hero.kind} [named|called] {hero}. "
        "{hero} lived {place.where}.",
        "Once upon a time, {place.where}, there lived a <kindly> {hero.kind} named {hero}.",
        "Once upon a time there was a <kindly> {hero.kind} named {hero} who lived {place.where}.",
        "Once upon a time, a <kindly> {hero.kind} named {hero} lived {place.where} "
        "with {his} {family}.",
    ),
    "plain_opening": (
        "{hero} was a <kindly> {hero.kind} who lived {place.where}.",
        "Long ago, {place.where}, there lived a <kindly> {hero.kind} named {hero}.",
        "There was once a <kindly> {hero.kind} named {hero}, who lived {place.where}.",
        "This is the story of {hero}, a <kindly> {hero.kind} who lived {place.where}.",
        "A <kindly> {hero.kind} named {hero} lived {place.where} with {his} {family}.",
        "It was a <fine> {season} morning. {place.Where}, a <kindly> {hero.kind} named {hero} "
        "[woke up early|opened the window|was already awake].",
    ),
    "kindly": (
        "kind",
        "curious",
        "cheerful",
        "shy",
        "brave",
        "clever",
        "gentle",
        "lively",
        "quiet",
        "busy",
        "merry",
        "friendly",
        "playful",
        "dreamy",
        "little",
        "young",
    ),
    "fine": ("bright", "fine", "cool", "clear", "golden", "lovely"),
    "hobby": (
        "loved to pick berries",
        "liked to watch the clouds",
        "loved to collect round pebbles",
        "liked to hum while walking",
        "loved puddles and mud",
        "liked riddles and jokes",
        "loved to read by candlelight",
        "liked to count the stars",
        "loved to chase butterflies",
        "liked to sleep in the sun",
        "loved stories about dragons",
        "liked to draw in the sand",
        "loved to climb trees",
        "liked to talk to the birds",
        "asked a hundred questions every day",
        "loved the smell of fresh bread",
        "wanted to see the whole world one day",
        "knew every path for miles around",
        "always had a pocket full of string",
        "liked to sing in the bath",
        "never went out without a red cap",
        "was good at finding lost things",
        "loved snow as much as sunshine",
        "liked nothing better than a long walk",
    ),
    "one_day": (
        "One day,",
        "One <fine> morning,",
        "One {season} afternoon,",
        "One {season} day,",
        "On a <fine> {season} day,",
        "Early one morning,",
    ),
    "oh_no": ("Oh no", "Oh dear", "Goodness me", "How terrible", "This cannot be"),
    "cried": ("cried", "gasped", "exclaimed", "called"),
    "said": ("said", "answered", "replied"),
    "sad": (
        "A tear rolled down {hero}'s cheek.",
        "{hero} felt very sad.",
        "{hero}'s heart was heavy.",
        "{hero} sat down and sighed.",
        "{hero}'s lip began to tremble.",
    ),
    "glad": (
        "{hero} [laughed|smiled|jumped] for joy.",
        "{hero} had never been so happy.",
        "{hero}'s heart felt as light as a feather.",
        "{hero} could not stop smiling.",
        "{hero} clapped and cheered.",
    ),
    "proud": (
        "{hero} was very proud.",
        "{hero} glowed with pride.",
        "{hero} felt ten feet tall.",
        "{hero} [grinned|beamed] from ear to ear.",
    ),
    "under": ("the bed", "the table", "the old sofa", "the stairs", "the rug", "the bench"),
    "behind": ("the door", "the curtain", "the stove", "the cupboard", "the flower pots"),
    "junk": (
        "a sock with a hole",
        "a dusty cobweb",
        "an old broom",
        "a sleepy spider",
        "a broken cup",
        "a heap of crumbs",
    ),
    "comfort": (
        "Do not cry",
        "Do not worry",
        "Cheer up",
        "Take heart",
        "Dry your eyes",
    ),
    "together": (
        "I will help you",
        "We will do it together",
        "Two can do more than one",
        "That is what friends are for",
        "Let us start right away",
    ),
    "eat": (
        "[Then|Afterwards] they [ate|shared] {sweet} [until they were full|in the evening sun|"
        "by the fire].",
        "They had {sweet} for supper, and supper had never tasted better.",
        "{His} {family} [made|brought] {sweet} for both of them.",
    ),
    "thanks": (
        "Thank you with all my heart",
        "Thank you so much",
        "I will never forget this",
        "You are so kind",
        "I could not have done it alone",
    ),
    "closing": (
        "And from that day on, {hero} and {friend} were the best of friends.",
        "That night, {hero} fell asleep with a smile.",
        "And they all lived happily ever after.",
        "{hero} and {friend} talked about that day for years.",
        "It had been a day that {hero} would always remember.",
        "{hero} and {friend} waved to each other until the stars came out.",
        "And if they have not grown too old, {hero} and {friend} are still laughing about it.",
        "The moon rose over {place.spot}, and all was well.",
        "And whenever {hero} thought of that day, {he} had to smile.",
        "{hero} told {his} {family} all about it, from beginning to end.",
        "From then on, {hero} and {friend} met at {place.spot} every day.",
        '"What will we do tomorrow?" asked {friend}. But that is another story.',
        "And that was the end of a very good day.",
    ),
    "met": (
        "Near {place.spot}, {hero} met {friend.full}.",
        "At {place.spot}, {he} ran into {friend.full}.",
        "Just then, {friend.full} came by.",
        "On the way to {place.spot}, {he} saw {friend.full}.",
    ),
    "best_friend": (
        "{His} best friend was {friend.full}.",
        "{He} often played with {friend.full}.",
        "Not far away lived {friend.full}, {his} best friend.",
        "Every day, {he} went to {place.spot} with {friend.full}.",
    ),
    "ask_wrong": (
        '"What is the matter, {hero}?" asked {friend}.',
        '"Why do you look so sad, {hero}?" asked {friend}.',
        '"You look worried, {hero}. What happened?" {friend} asked.',
    ),
    "lost_found": (
        "At {place.far}, they saw a magpie nest in a tall tree. Something was sticking out of it. "
        "{friend} [held the branch|stood below] while {hero} climbed up. It was the {thing}! The "
        "magpie had [stolen|taken] it for her nest. {hero} gave the magpie [a bright ribbon|"
        "a shiny spoon|a piece of tinsel] instead.",
        '"Where did you go yesterday?" asked {friend}. {hero} thought hard. "[I was near|'
        'I went to] {place.far}," {he} said. They followed the path all the way to {place.far}. '
        "There, [in the tall grass|under a big leaf|between two stones], lay the {thing.look} "
        "{thing}! It must have fallen [out of {his} bag|to the ground] the day before.",
        "They searched everywhere. At last they came to {place.hidden}. A baby {small} was "
        "fast asleep there, curled up against the {thing}. "
        '"It was [lonely|cold] and wanted company," whispered {friend}. {hero} waited until the '
        "baby {small} woke up, and only then took the {thing} home.",
        "They asked {elder} the {elder.job} for help. {elder} [smiled|laughed|scratched "
        '{elder.his} head]. "[I found a {thing}|Somebody lost a {thing}] near {place.far} this '
        'morning," said {elder}, and [opened|unlocked] a drawer. There it was, the {thing.look} '
        "{thing}!",
    ),
    "shy_reason": (
        "I have only just moved here",
        "I do not know anybody here",
        "Nobody has asked me to play",
        "I am new here, and I am a little shy",
    ),
    "game": (
        "hide and seek",
        "catch",
        "pirates",
        "leapfrog",
        "explorers",
        "marbles",
        "kings and queens",
    ),
    "obstacle": (
        "The path was blocked by thorns, but {friend} found a way around them.",
        "A wide stream lay in their way. They laid a log across it and balanced to the other side.",
        "It grew so dark that they could hardly see. {hero} took {friend} by the hand.",
        "A grumpy goose would not let them pass. {friend} gave the goose a crust of bread, and it "
        "waddled away.",
        "They took a wrong turn and had to walk all the way back. {friend} sang to keep their "
        "spirits up.",
        "The hill was steep, and {hero} was soon out of breath. {friend} pushed from behind.",
    ),
    "skill_end": (
        "From then on, {hero} and {other} practiced side by side.",
        "And soon {other} could {skill}, too.",
        "By the end of the year, {hero} and {other} were the best of friends.",
        "And {elder} [smiled|nodded] and said nothing at all.",
    ),
    "weeks": ("a week", "two weeks", "three days", "many days", "ten days", "a month"),
    "gift": (
        "a warm pair of mittens",
        "a jar of pickles",
        "a wooden horse",
        "a small brass bell",
        "a book of fairy tales",
        "a bunch of violets",
        "a straw hat",
        "a wind chime",
    ),
}
